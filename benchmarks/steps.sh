# Sourced by scripts that run named steps: sets status to 1 if one fails. Needs out and steps; TAIL is how
# many lines of a failed one are shown.
# shellcheck shell=bash disable=SC2154,SC2034
mkdir -p "$out"
status=0

step() {  # step NAME COMMAND...: runs it if NAME, or that up to its "-", was asked for; output in a log
  local name=$1
  shift
  case " $steps " in *" ${name%%-*} "* | *" $name "*) ;; *) return ;; esac
  local begun=$SECONDS
  if "$@" >"$out/$name.log" 2>&1; then echo "$name: ok, $((SECONDS - begun)) s"
  else status=1; echo "$name: FAILED, $((SECONDS - begun)) s"; tail -n "${TAIL:-40}" "$out/$name.log"; fi
}

"""Builds, tries and exports an image with buildah, as root: `image.py [cpu|cuda12|cuda13]`.

`--base debian` starts from a base of its own made by debootstrap, for machines that reach no image
registry; `--base IMAGE` from an image that buildah has. `image.py --bake` prints docker/bake.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import yaml
from toolchain import BUILD, ROOT, Unavailable, call, project_version, versions

BUILDAH = ("buildah", "--storage-driver", "overlay")
SUITE = "bookworm"
DEMO = ("python", "/opt/cccl/examples/train_gpt.py", "--size", "tiny", "--steps", "6",
        "--lab-steps", "3")  # fmt: skip


def main() -> None:
    """Does what the command line says; ends at the first thing that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default="cpu", choices=list(versions()["images"]))
    parser.add_argument("--base", help="'debian', or an image, instead of the pinned one")
    parser.add_argument("--build-base", help="the same for the stage that compiles")
    parser.add_argument("--bake", action="store_true", help="print docker/bake.json")
    options = parser.parse_args()
    if options.bake:
        print(json.dumps(bake(), indent=2))
        return
    missing = [t for t in ("buildah", "debootstrap") if not shutil.which(t)]
    if missing or os.geteuid() != 0:
        raise Unavailable(f"needs root, and apt-get install {' '.join(missing) or 'nothing more'}")
    name = f"localhost/cccl:{options.target}"
    build(options, name)
    container = call(*BUILDAH, "from", name, capture=True).strip()
    try:
        inspect(name)
        try_out(container)
    finally:
        call(*BUILDAH, "rm", container)
    archive = ROOT / "dist" / f"cccl-{options.target}.oci.tar"
    archive.parent.mkdir(exist_ok=True)
    archive.unlink(missing_ok=True)
    call(*BUILDAH, "push", "--quiet", name, f"oci-archive:{archive}:cccl:{options.target}")
    check_archive(archive)
    print(f"{archive.relative_to(ROOT)}: {archive.stat().st_size / 1e6:.0f} MB")


def arguments(target: str) -> dict[str, str]:
    """The Dockerfile's, from the data file."""
    row = versions()["images"][target]
    return {"BUILD_BASE": row["build"], "BASE": row["base"], "TORCH": row["torch"],
            "TORCH_INDEX": row["torch_index"], "CUDA": row["cuda"]}  # fmt: skip


def bake() -> dict[str, Any]:
    """What `docker buildx bake -f docker/bake.json` reads."""
    targets = versions()["images"]
    stamps = {"VERSION": "${VERSION}", "REVISION": "${REVISION}"}
    return {
        "variable": {name: {"default": "unknown"} for name in stamps},
        "group": {"default": {"targets": list(targets)}},
        "target": {
            target: {
                "dockerfile": "docker/Dockerfile",
                "tags": [f"cccl:{target}"],
                "args": arguments(target) | stamps,
            }
            for target in targets
        },
    }


def build(options: argparse.Namespace, name: str) -> None:
    """`buildah bud`, with this machine's pip settings and certificates."""
    given = arguments(options.target)
    given |= {"VERSION": project_version(), "REVISION": revision()}
    if options.base:
        base = debian_base() if options.base == "debian" else options.base
        # Without a registry there is no index of CPU builds either: pip's own settings serve.
        given |= {"BASE": base, "BUILD_BASE": options.build_base or base, "TORCH_INDEX": ""}
    built = [word for pair in given.items() for word in ("--build-arg", "=".join(pair))]
    call(*BUILDAH, "bud", "--isolation", "chroot", "--format", "docker", *built,
         *host_settings(), "--tag", name, "--file", "docker/Dockerfile", ".")  # fmt: skip


def debian_base() -> str:
    """Debian's minimal system, by debootstrap, as an image; made once."""
    image = f"localhost/debian:{SUITE}"
    if call(*BUILDAH, "images", "--quiet", "--filter", f"reference={image}", capture=True).strip():
        return image
    BUILD.mkdir(exist_ok=True)
    tree = BUILD / f"debian-{SUITE}"
    shutil.rmtree(tree, ignore_errors=True)
    call("debootstrap", "--variant=minbase", SUITE, tree, stdout=subprocess.DEVNULL)
    shutil.rmtree(tree / "var/cache/apt/archives")
    container = call(*BUILDAH, "from", "scratch", capture=True).strip()
    call(*BUILDAH, "copy", "--quiet", container, tree, "/")
    call(*BUILDAH, "commit", "--quiet", "--rm", container, image)
    shutil.rmtree(tree)
    return image


def host_settings() -> list[str]:
    """Mounts that let pip in the build reach what pip here reaches; empty mount points stay."""
    shown = call(sys.executable, "-m", "pip", "config", "list", capture=True)
    settings = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)

    def words(key: str) -> list[str]:
        found = settings.get(f":env:.{key}") or settings.get(f"global.{key}") or ""
        return found.strip("'").split()

    lines, mounts = ["[global]"], []
    for key in ("index-url", "extra-index-url"):
        lines += [f"{key} = {url}" for url in words(key) if not url.startswith("file:")]
    for folder in filter(os.path.isdir, words("find-links")):
        lines.append(f"find-links = {folder}")
        mounts.append((folder, folder))
    for bundle in words("cert"):
        # Not over the image's own certificates, which its packages write.
        lines.append("cert = /run/host-certificates.pem")
        mounts.append((bundle, "/run/host-certificates.pem"))
    BUILD.mkdir(exist_ok=True)
    file = BUILD / "pip.conf"
    file.write_text("\n".join([*lines, ""]))
    mounts.append((str(file), "/etc/pip.conf"))
    return [word for a, b in mounts for word in ("--volume", f"{a}:{b}:ro")]


def inspect(name: str) -> None:
    """User, labels, health check and command are what the Dockerfile promises."""
    config = json.loads(call(*BUILDAH, "inspect", "--type", "image", name, capture=True))
    config = config["Docker"]["config"]
    assert config["User"] == "10001", config["User"]
    assert config["Labels"]["org.opencontainers.image.version"] == project_version()
    assert config["Labels"]["org.opencontainers.image.revision"] == revision()
    assert "doctor" in config["Healthcheck"]["Test"], config["Healthcheck"]
    assert config["Cmd"] == list(DEMO[:2]), config["Cmd"]


def try_out(container: str) -> None:
    """Its health check, a short demo, and the two ranks of compose.yaml."""
    found = json.loads(run_in(container, "python", "-m", "cccl", "doctor", "--json"))
    assert not found["problems"], found["problems"]
    assert run_in(container, "id", "-u").strip() == "10001"
    print(run_in(container, *DEMO))
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    outputs: dict[str, str] = {}

    def rank(service: str) -> None:
        # Both run on this host's network, where a service's name means nothing.
        words = [w.replace("rank0", "127.0.0.1") for w in shlex.split(services[service]["command"])]
        outputs[service] = run_in(container, *words, "--json")

    threads = [threading.Thread(target=rank, args=[service]) for service in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in outputs["rank0"].splitlines() if line.startswith("{")]
    assert {row["codec"] for row in rows} == {"block_float8", "none"}, outputs
    assert all(row["world_size"] == 2 for row in rows), rows
    print(f"compose.yaml's ranks: {rows}")


def run_in(container: str, *command: str) -> str:
    """A command in the image, as its user; ended after five minutes."""
    return call("timeout", "300", *BUILDAH, "run", "--isolation", "chroot", "--volume",
                "/etc/hosts:/etc/hosts:ro", "--hostname", "localhost", container, "--", *command,
                capture=True)  # fmt: skip


def check_archive(archive: Path) -> None:
    """An OCI layout whose one image has our configuration."""
    with tarfile.open(archive) as tar:

        def blob(descriptor: dict[str, Any]) -> Any:
            return json.load(tar.extractfile("blobs/" + descriptor["digest"].replace(":", "/")))

        (manifest,) = json.load(tar.extractfile("index.json"))["manifests"]
        config = blob(blob(manifest)["config"])["config"]
    assert config["User"] == "10001" and config["Cmd"] == list(DEMO[:2]), config


def revision() -> str:
    """The commit that is built."""
    return call("git", "rev-parse", "HEAD", capture=True).strip()


if __name__ == "__main__":
    try:
        main()
    except Unavailable as error:
        raise SystemExit(str(error)) from error

"""What happened: bytes, times and errors of every collective, and a report of them."""

from __future__ import annotations

from typing import Any

from . import _core
from ._config import current_config

_SUMMED = ("calls", "values", "value_bytes", "bytes_sent", "bytes_received", "plain_bytes")


def stats() -> dict[str, Any]:
    """Totals, and rows by label, collective, codec, algorithm, dtype and leg, since the last reset.

    A row has, summed over its calls: `calls`, `failures`, `values`, `value_bytes` (uncompressed),
    `bytes_sent` and `bytes_received` (payloads with their headers; estimated for plain rows),
    `plain_bytes` (what a plain ring would have sent), `ratio` (plain_bytes / bytes_sent),
    `encode_seconds`, `reduce_seconds`, `decode_seconds`, `exposed_seconds` (waiting for the
    network), `total_seconds` (these on a GPU extrapolated from some of the calls),
    `latency_seconds`, `relative_error` (of a sample of the first payload in each call: norm of the
    error over norm of the values), `non_finite`, `plain` and, for plain rows, `reason`.
    Where compression_type "auto" decided: `predicted_seconds` of the way taken and
    `alternative_seconds` of the best other one, to compare with `latency_seconds`.
    `relative_noise` is that of the mean in calls that measured it (`max_noise_share`): its standard
    deviation, by the variance between ranks, over its root mean square; 0 where none did; `zeros`
    is the share of zeros in the mean, in these.
    `feedback_calls` counts calls with error feedback. `leg` is "" or, of hierarchical collectives,
    which count once for each leg, "inside" a host or "between" hosts. The total also has
    `bytes_inside` and `bytes_between`, sent in these; `pool_bytes`, the memory held for payloads in
    flight; and `state_bytes`, that of residuals.
    """
    rows = _core.stats_rows()
    for row in rows:
        row["plain_bytes"] = plain_bytes(row["collective"], row["value_bytes"], row["world_size"])
        row["ratio"] = _ratio(row)
        if row["plain"] and row["predicted_seconds"]:
            row["reason"] += f" ({_expectation(row)})"
        timed = row.pop("timed_calls")
        for name in ("encode", "reduce", "decode", "exposed", "total"):
            row[f"{name}_seconds"] *= row["calls"] / timed if timed else 0.0
        squares, errors = row.pop("squares"), row.pop("error_squares")
        row["relative_error"] = (errors / squares) ** 0.5 if squares > 0 else 0.0
        values, variances, square, zeros = (
            row.pop(f"noise_{name}") for name in ("values", "variances", "squares", "zeros")
        )
        noise = variances / row["world_size"]
        row["relative_noise"] = (noise / square) ** 0.5 if square > 0 else 0.0
        row["zeros"] = zeros / values if values else 0.0
    total: dict[str, Any] = {key: sum(row[key] for row in rows) for key in _SUMMED}
    total["ratio"] = _ratio(total)
    for leg in ("inside", "between"):
        total[f"bytes_{leg}"] = sum(row["bytes_sent"] for row in rows if row["leg"] == leg)
    total["pool_bytes"] = _core.pool_bytes()
    total["state_bytes"] = _core.state_bytes()
    total["plain_calls"] = sum(row["calls"] for row in rows if row["plain"])
    return {"total": total, "rows": rows}


def reset_stats() -> None:
    """Starts counting anew."""
    _core.reset_stats()


def plain_bytes(collective: str, value_bytes: int, world_size: int) -> int:
    """Bytes that a bandwidth-optimal plain algorithm sends per rank.

    `value_bytes` is the input's size on this rank.
    """
    if world_size < 2:
        return 0
    others = world_size - 1
    factor = {
        "all_reduce": 2 * others / world_size,
        "reduce_scatter": others / world_size,
        "all_gather": others,
        "broadcast": 1,
        "send": 1,
        "recv": 0,
    }[collective]
    return round(factor * value_bytes)


def report() -> str:
    """The same as a table for people, with the settings that had no effect."""
    data = stats()
    noisy = any(row["relative_noise"] for row in data["rows"])
    head = ("label", "collective", "codec", "calls", "plain MB", "sent MB", "ratio", "error",
            "ms/call", "waiting", *(["noise"] if noisy else []))  # fmt: skip
    lines = [head]
    for row in data["rows"]:
        calls = row["calls"]
        busy = row["total_seconds"]
        label = f"{row['label']} ({row['leg']})" if row["leg"] else row["label"]
        codec = f"plain ({row['reason']})" if row["plain"] else row["codec"]
        if row["predicted_seconds"] and not row["plain"]:
            codec += f" (auto: {_expectation(row)})"
        lines.append((
            label, row["collective"], codec, str(calls),
            f"{row['plain_bytes'] / 1e6:.2f}", f"{row['bytes_sent'] / 1e6:.2f}",
            f"{row['ratio']:.2f}x", f"{row['relative_error']:.1e}",
            f"{1e3 * row['latency_seconds'] / calls:.2f}",
            f"{row['exposed_seconds'] / busy:.0%}" if busy else "-",
            *([f"{row['relative_noise']:.1e}" if row["relative_noise"] else "-"] if noisy else []),
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    total = data["total"]
    text.append(
        f"total: {total['calls']} collectives ({total['plain_calls']} plain), "
        f"{total['bytes_sent'] / 1e6:.2f} MB sent instead of {total['plain_bytes'] / 1e6:.2f} MB: "
        f"{total['ratio']:.2f}x"
    )
    without = sum(
        row["calls"] - row["feedback_calls"]
        for row in data["rows"]
        if not (row["plain"] or row["leg"] == "inside")
        and row["collective"] in ("all_reduce", "reduce_scatter")
    )
    if current_config().feedback and without:
        text.append(f"error_feedback: {without} collectives had none, as they have no label")
    text += [
        f"{name} has no effect: "
        + (
            "there is no error feedback"
            if name.startswith("residual_")
            else "neither compression_type nor result_type is sparse"
        )
        for name in current_config().unused
    ]
    return "\n".join(text)


def _expectation(row: dict[str, Any]) -> str:
    """What compression_type "auto" expected, per call."""
    taken, other = (
        1e3 * row[f"{key}_seconds"] / row["calls"] for key in ("predicted", "alternative")
    )
    return f"predicted {taken:.2g} ms against {other:.2g} ms"


def _ratio(row: dict[str, Any]) -> float:
    return row["plain_bytes"] / row["bytes_sent"] if row["bytes_sent"] else 1.0

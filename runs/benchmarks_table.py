"""Prints the tables of docs/kernels from the JSON files of the benchmarks given as arguments."""

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

HEADER = ("op", "direction", "shape", "dtype", "fastppo", "GB/s", "of a copy", "MiB", "peers: time, MiB, times faster")


def duration(us: float, clock: str = "graph") -> str:
    unit, size = next((x for x in (("s", 1e6), ("ms", 1e3)) if us >= x[1]), ("us", 1.0))
    return f"{us / size:.3g} {unit}" + ("" if clock == "graph" else f" ({clock})")


def peer(row: dict[str, Any]) -> str:
    notes = ["does less"] * bool(row.get("is_bound")) + ["another answer"] * bool(row.get("peer_differs"))
    name = row["peer"] + (f" ({', '.join(notes)})" if notes else "")
    mib = row.get("peer_peak_mib")
    time = duration(row["peer_us"], row.get("peer_clock", "graph"))
    cells = f"{name} {time}, {'?' if mib is None else f'{mib:.0f}'}, {row['times_faster']:.3g} x"
    if "floor" in row:
        cells += f" ({row['peer_per_floor']:.3f} of {row['floor']}, ours {row['ours_per_floor']:.3f})"
    return cells


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """One line for a shape; our own time is that beside the first of its peers."""
    first = rows[0]
    gbps, share, mib = first["gbps"], first.get("copy_share"), first.get("ours_peak_mib")
    return [
        *(first[name] for name in ("op", "direction", "shape", "dtype")),
        duration(first["ours_us"], first.get("clock", "graph")),
        "" if gbps is None else f"{gbps:.0f}",
        "" if share is None else f"{share:.0%}",
        "" if mib is None else f"{mib:.0f}",
        "; ".join(map(peer, rows)),
    ]


def table(file: Path) -> list[str]:
    rows = [x["extra_info"] for x in json.loads(file.read_text())["benchmarks"] if "ours_us" in x["extra_info"]]
    if not rows:
        return [f"{file.name}: no row was measured"]
    first = rows[0]
    where = f"{first['machine']}, torch {first['versions']['torch']}, {first['threads']} threads"
    if "copy_gbps" in first:
        where += f", a copy {first['copy_gbps']:.0f} GB/s"
    lines = [where, "", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["op"], row["direction"], row["shape"], row["dtype"], row.get("clock", "")

    for _, same in groupby(sorted(rows, key=key), key):
        lines.append("| " + " | ".join(cells(list(same))) + " |")
    return lines


if __name__ == "__main__":
    print("\n\n".join("\n".join(table(Path(name))) for name in sys.argv[1:]))

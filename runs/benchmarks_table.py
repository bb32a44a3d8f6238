"""Prints the tables of docs/kernels from the JSON files of the benchmarks given as arguments."""

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

HEADER = ("op", "direction", "shape", "dtype", "fastppo", "GB/s", "of a copy", "MiB", "peers: time, MiB, times faster")

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The rows that were measured, of a JSON file of pytest-benchmark; a ValueError where it is none."""
    try:
        return [x["extra_info"] for x in json.loads(file.read_text())["benchmarks"] if "ours_us" in x["extra_info"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} must be a JSON file of pytest-benchmark, with a list `benchmarks`: {error!r}"
        ) from None


def duration(us: float, clock: str = "graph") -> str:
    unit, size = next((x for x in (("s", 1e6), ("ms", 1e3)) if us >= x[1]), ("us", 1.0))
    return f"{us / size:.3g} {unit}" + ("" if clock == "graph" else f" ({clock})")


def peer_name(row: Row) -> str:
    notes = ["does less"] * bool(row.get("is_bound")) + ["another answer"] * bool(row.get("peer_differs"))
    return row["peer"] + (f" ({', '.join(notes)})" if notes else "")


def peer(row: Row) -> str:
    mib = row.get("peer_peak_mib")
    time = duration(row["peer_us"], row.get("peer_clock", "graph"))
    cells = f"{peer_name(row)} {time}, {'?' if mib is None else f'{mib:.0f}'}, {row['times_faster']:.3g} x"
    if "floor" in row:
        cells += f" ({row['peer_per_floor']:.3f} of {row['floor']}, ours {row['ours_per_floor']:.3f})"
    return cells


def cells(rows: list[Row]) -> list[str]:
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


def where(row: Row) -> str:
    """Machine, version and threads of a row, which are those of its file."""
    place = f"{row['machine']}, torch {row['versions']['torch']}"
    place += f", {row['threads']} threads" if "threads" in row else ""
    return place + (f", a copy {row['copy_gbps']:.0f} GB/s" if "copy_gbps" in row else "")


def kinds(rows: list[Row]) -> list[list[Row]]:
    """The rows by op, direction, shape, dtype and clock: of each one row for every peer."""

    def key(row: Row) -> tuple[str, ...]:
        return row["op"], row["direction"], row["shape"], row["dtype"], row.get("clock", "")

    return [list(same) for _, same in groupby(sorted(rows, key=key), key)]


def table(file: Path) -> list[str]:
    rows = read(file)
    if not rows:
        return [f"{file.name}: no row was measured"]
    lines = [where(rows[0]), "", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    return lines + ["| " + " | ".join(cells(same)) + " |" for same in kinds(rows)]


if __name__ == "__main__":
    print("\n\n".join("\n".join(table(Path(name))) for name in sys.argv[1:]))

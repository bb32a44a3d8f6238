"""runs/benchmark_charts.py: which rows are drawn, in which order, beside which floor, and what the files must be."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "runs"))

import benchmark_charts as charts  # noqa: E402


def row(peer: str, us: float, **more: Any) -> dict[str, Any]:
    """Ours takes 10 us."""
    about = {"op": "logprob + entropy", "direction": "fwd", "shape": "64x1000", "dtype": "float32", "machine": "A card"}
    timed = {"peer": peer, "ours_us": 10.0, "peer_us": us, "times_faster": us / 10, "versions": {"torch": "2.11.0"}}
    return {**about, **timed, "threads": 2, **more}


def pictures(*rows: dict[str, Any]) -> dict[str, list[tuple[str, list[tuple[str, str]]]]]:
    named = charts.pictures(list(rows))
    return {
        name: [(one.title, [(bar.name, bar.text) for bar in one.bars]) for one in panels]
        for name, panels in named.items()
    }


def test_the_floor_comes_first_then_ours_then_peers_from_fast_to_slow():
    gpu = {"clock": "events", "peer_clock": "events"}
    assert pictures(
        row("slow", 20_500, **gpu),
        row("quick", 5, is_bound=True, **gpu),
        row("products: 3", 8, is_bound=True, **gpu),
        row("wrong", 25, peer_differs="by 1", **gpu | {"peer_clock": "wall"}),
    ) == {
        "bench_logprob_a-card": [
            (
                "logprob + entropy, forward, 64x1000 float32",
                [
                    ("3 products by cuBLAS", "8 us"),
                    ("fastppo", "10 us"),
                    ("quick (does less)", "5 us, 0.5 x"),
                    ("wrong (another answer)", "25 us (wall), 2.5 x"),
                    ("slow", "20.5 ms, 2,050 x"),
                ],
            )
        ]
    }
    ((_, bars),) = pictures(row("peer", 20, copy_gbps=100.0, gbps=80.0, copy_share=0.8))["bench_logprob_a-card"]
    assert bars == [("a copy of as many bytes", "8 us"), ("fastppo", "10 us"), ("peer", "20 us, 2 x")]


def test_one_shape_of_an_op_is_drawn_and_no_call_of_the_host():
    small, large = ([row(peer, 20, shape=shape) for peer in "ab"] for shape in ("8x1000", "16x1000"))
    host = [row("a", 20, direction="fwd host"), row("a", 20, direction="fwd+bwd", clock="wall")]
    more = [row("c", 20, shape="8x1000"), row("a", 20, shape="8x1000", direction="fwd+bwd")]

    def titles(*rows: dict[str, Any]) -> list[str]:
        ((_, panels),) = pictures(*rows).items()
        return [title.removeprefix("logprob + entropy, ") for title, _ in panels]

    assert titles(*small, *large, *host) == ["forward, 16x1000 float32"]  # as many peers: the larger
    assert titles(*large, *more, *small) == ["forward, 8x1000 float32", "forward and backward, 8x1000 float32"]
    assert titles(*large, *(one | {"shape": "2x8000"} for one in large)) == ["forward, 2x8000 float32"]  # longer rows


def test_panels_that_do_not_fit_go_into_the_next_picture():
    peers = [f"peer {i}" for i in range(6)]
    rows = [row(peer, 20, direction=way) for way in ("fwd", "save", "recompute") for peer in peers]
    others = [row("peer", 20, op=op) for op in ("gae + whiten", "gae", "linear_ppo_loss, frozen")]
    found = {name: [len(bars) for _, bars in panels] for name, panels in pictures(*rows, *others).items()}
    assert charts.MAX_BARS == 12
    assert found == {
        "bench_logprob_a-card": [7],
        "bench_logprob_a-card_2": [7],
        "bench_logprob_a-card_3": [7],
        "bench_gae_a-card": [2, 2],
        "bench_linear_ppo_loss_a-card": [2],
    }


@pytest.mark.parametrize(("slowest", "log"), [(300, False), (301, True)])
def test_the_scale_is_logarithmic_where_bars_would_vanish(slowest: float, log: bool, tmp_path: Path):
    panel = charts.panel([row("peer", slowest)])
    assert charts.is_log(panel) is log
    ax = charts.Figure().subplots()
    charts.draw_panel(ax, panel)
    assert ax.get_xscale() == ("log" if log else "linear")
    assert [bar.get_width() for bar in ax.patches] == [10, slowest]
    low, high = ax.get_ylim()
    assert low > high and (ax.get_xlim()[0] == 0) is not log  # the first bar is the uppermost
    assert any("logarithmic scale" in text.get_text() for text in ax.texts) is log


def test_whole_steps_stand_beside_those_of_the_same_work(tmp_path: Path):
    work = {"shape": "llama-1b", "prompts": 16, "samples": 4, "prompt_tokens": 128, "response_tokens": 256}
    about = {"variant": "", "trained_dtype": "bfloat16", "machine": "A card", "versions": {"trl": "1.16.0"}}

    def step(trainer: str, algorithm: str, seconds: float, **more: Any) -> dict[str, Any]:
        run = {"trainer": trainer, "algorithm": algorithm, "step_s": seconds, "gradient_checkpointing": True}
        return work | about | run | more

    lines = [
        step("trl", "rloo", 4.0),
        step("fastppo", "rloo", 1.0),
        step("fastppo", "rloo", 0.1, gradient_checkpointing=False),
        step("trl", "grpo", 9.0),
        step("trl", "rloo", 9.0, error="out of memory"),
    ]
    sides = {"seconds": [2.0, 1.0, 3.0]}, {"seconds": [30.0, 20.0, 25.0]}
    lines.append(
        work
        | {"case": "ragged", "requests": 256, "dtype": "bfloat16", "ratio": 12.4, "machine": "A card"}
        | {"fastppo": sides[0], "transformers": sides[1], "versions": {"transformers": "5.17.0"}}
    )
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert pictures(*charts.rows_of(file)) == {
        "bench_generation_a-card": [
            (
                "generation, ragged, 256 x (128 + 256) tokens, llama-1b bfloat16",
                [("fastppo", "2 s"), ("transformers 5.17.0", "25 s, 12.4 x")],
            )
        ],
        "bench_training_step_a-card": [
            (
                "training step, RLOO, 64 x (128 + 256) tokens, llama-1b bfloat16",
                [("fastppo", "1 s"), ("TRL 1.16.0", "4 s, 4 x")],
            )
        ],
    }


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"benchmarks": []}', '{"benchmarks": [{"extra_info": {}}]}'])
def test_a_file_without_benchmarks_is_named(text: str, tmp_path: Path):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json (must be a JSON file of pytest-benchmark|has no row in which)"):
        charts.rows_of(file)


def test_rows_of_two_machines_are_refused(tmp_path: Path):
    file = tmp_path / "both.json"
    rows = [row("TRL", 20), row("TRL", 30, machine="Another card")]
    file.write_text(json.dumps({"benchmarks": [{"extra_info": one} for one in rows]}))
    with pytest.raises(ValueError, match=r"both\.json must have the rows of one machine, got A card, Another card"):
        charts.rows_of(file)


def test_the_program_writes_a_picture_that_suits_light_and_dark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file, out = tmp_path / "card.json", tmp_path / "out"
    rows = [row("TRL", 20), {"op": "not measured"}]
    file.write_text(json.dumps({"benchmarks": [{"extra_info": one} for one in rows]}))
    monkeypatch.setattr(sys, "argv", ["benchmark_charts.py", "--out", str(out), str(file)])
    charts.main()
    picture = out / "bench_logprob_a-card.png"
    drawn = "  logprob + entropy, forward, 64x1000 float32: fastppo 10 us; TRL 20 us, 2 x"
    assert capsys.readouterr().out.splitlines() == [str(picture), drawn]
    pixels = charts.Image.open(picture).convert("RGBA")
    assert pixels.getpixel((0, 0))[3] == 0 and pixels.getextrema()[3] == (0, 255)
    monkeypatch.setattr(sys, "argv", ["benchmark_charts.py", "--out", str(out), str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match="2"):
        charts.main()
    assert "none.json" in capsys.readouterr().err


def test_pages_show_every_picture_that_is_kept():
    kept = {path.name: path.stat().st_size for path in (ROOT / "docs" / "images").glob("bench_*.png")}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert len(kept) >= 14 and max(kept.values()) < 60_000
    assert [name for name in kept if f"images/{name})" not in pages] == []
    measured = {
        f"{name}.png"
        for file in (ROOT / "benchmarks" / "baselines").glob("*.json")
        for name in charts.pictures(charts.rows_of(file))
    }
    assert {name.split("_")[1] for name in kept.keys() - measured} <= {"training", "generation"}

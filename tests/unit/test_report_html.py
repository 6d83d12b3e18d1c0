# SPDX-License-Identifier: Apache-2.0
"""What a sweep's end says: which to ship, the page at two widths, BEST. The numbers are made up."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nemo_automodel.components.speculative.bench.leaderboard import collect, write_leaderboard
from nemo_automodel.components.speculative.bench.plots import validation_of
from nemo_automodel.components.speculative.bench.verdict import judge

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHELL = "env A=1 python -m vllm.entrypoints.openai.api_server --model t --port 41233 --dtype auto"


def bench(k: int, rate: float, base: float = 100.0, **more) -> dict:
    speedup = rate / base
    positions = [0.9 - 0.1 * i for i in range(k)]
    own = {
        "k": k, "tokens_per_s": rate, "baseline_tokens_per_s": base, "speedup": speedup, "prompts": 20, "requests": 40,
        "speedup_interval": [speedup - 0.1, speedup + 0.1], "tokens_per_s_interval": [rate - 9, rate + 9],
        "acceptance_length": 1 + sum(positions), "acceptance_per_position": positions, "text_equal": 20,
        "acceptance_per_position_intervals": [[p - 0.05, p + 0.05] for p in positions], "baseline_digest": "same",
        "latency": {"ttft_ms": {"p50": 9, "p90": 10, "p99": 11}, "itl_ms": {"p50": 1, "p90": 2, "p99": 3}},
        "levels": [{"concurrency": c, "speedup": speedup / c, "tokens_per_s": rate} for c in (1, 4)],
        "subsets": [{"name": name, "speedup": speedup, "speedup_interval": None,
                     "acceptance": {"acceptance_length": 2.0}} for name in ("<math>", "code")],
    }  # fmt: skip
    return own | more


def job(sweep: Path, name: str, benchmark: dict | None, *, step: int = 0, reason: str | None = None) -> Path:
    checkpoint = sweep.parent / "run" / "checkpoints" / f"epoch_1_step_{step}"
    (checkpoint / "model").mkdir(parents=True, exist_ok=True)
    (sweep / name).mkdir(parents=True)
    result = {"status": "failed" if reason else "ok", "reason": reason, "checkpoint": str(checkpoint / "model")}
    result |= {"stage": "done", "benchmark": benchmark, "versions": {"vllm": "0.32.0"}, "command": {"shell": SHELL}}
    (sweep / name / "result.json").write_text(json.dumps(result))
    return checkpoint


def verdict_of(sweep: Path):
    results = {path.parent.name: json.loads(path.read_text()) for path in sweep.glob("*/result.json")}
    return judge(collect(sweep), results)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    for name, k, rate, step in (("0", 2, 150.0, 100), ("1", 4, 180.0, 100), ("2", 2, 160.0, 900), ("3", 4, 190.0, 900)):
        checkpoint = job(folder, name, bench(k, rate), step=step)
        (checkpoint / "validation.json").write_text(json.dumps({"acceptance_length": 2.5, "loss": 1.0}))
    job(folder, "4", bench(0, 100.0), step=100)
    job(folder, "5", bench(0, 100.0), step=900)
    job(folder, "6", None, reason="the shard <model-00002> is missing " + "/a/very/long/path" * 20)
    return folder


def test_the_fastest_draft_is_shipped_with_the_command_that_serves_it(sweep: Path, capsys) -> None:
    assert write_leaderboard(sweep) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "ship this: epoch_1_step_900 with K=4" in said and "1.90x" in said and "interval 1.80 to 2.00" in said
    assert "--port 8000 --dtype auto" in said and "41233" not in said
    assert "not compared: 1 of 6 jobs failed before they were measured" in said


def test_jobs_without_speculation_that_shared_a_measurement_are_one_candidate(sweep: Path) -> None:
    bare = [entry for entry in collect(sweep) if entry.k == 0]
    assert [entry.job for entry in bare] == ["4,5"]
    job(sweep, "7", bench(0, 90.0, baseline_digest="another vLLM"))
    assert sorted(entry.job for entry in collect(sweep) if entry.k == 0) == ["4,5", "7"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"speedup": 0.9, "speedup_interval": [0.8, 1.0]}, "do not speculate"),
        ({"speedup": 1.04, "speedup_interval": [0.97, 1.1]}, "do not speculate"),
        ({"speedup": 1.04, "speedup_interval": [1.01, 1.1]}, "ship this"),
        ({"speedup": None, "speedup_interval": None}, "best of the drafts"),
    ],
)
def test_a_gain_that_cannot_be_told_from_none_is_none(tmp_path: Path, more: dict, told: str) -> None:
    job(tmp_path / "sweep", "0", bench(2, 120.0, **more))
    verdict = verdict_of(tmp_path / "sweep")
    assert verdict.headline.startswith(told) and (verdict.ship is None) == (told == "do not speculate")


@pytest.mark.parametrize("agrees", [True, False])
def test_what_is_served_otherwise_than_trained_is_shipped_with_a_word(tmp_path: Path, agrees: bool) -> None:
    wrong = {"what": "rope_theta is 500000.0, not 10000.0"}
    predicted = {"agrees": agrees, "acceptance_length": 3.5, "dtype": "float32", "export_differences": [wrong]}
    job(tmp_path / "sweep", "0", bench(2, 150.0, predicted=predicted | {"diagnosis": None}))
    verdict = verdict_of(tmp_path / "sweep")
    told = "not served as it was trained: acceptance length 2.700, predicted 3.500: rope_theta is 500000.0"
    assert any(told in reason for reason in verdict.reasons) != agrees and verdict.ship


def test_a_sweep_in_which_all_failed_ships_nothing(tmp_path: Path) -> None:
    job(tmp_path / "sweep", "0", None, reason="no")
    assert write_leaderboard(tmp_path / "sweep") == 1
    assert "nothing to ship" in (tmp_path / "sweep" / "report.html").read_text()


class Page(html.parser.HTMLParser):
    """What a browser would fetch, and which tags are open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.viewport, self.words = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        values = dict(attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if values.get("name") == "viewport":
            self.viewport = values["content"]
        links = [values.get(name) or "" for name in ("src", "href", "data")]
        self.fetched += [link for link in links if link and not link.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_stands_alone_and_nothing_in_it_is_taken_for_markup(sweep: Path) -> None:
    write_leaderboard(sweep)
    text = (sweep / "report.html").read_text()
    page = Page(text)
    assert page.open == [] and page.fetched == [] and page.viewport.startswith("width=device-width")
    assert "http" not in re.sub(r"(?s)<pre>.*?</pre>", "", text)
    titles = ("Acceptance per position", "Acceptance length by training step", "Speedup by requests at once")
    for told in (*titles, "ship this", "<model-00002> is missing", "<math>", "9.0 ms", "validation loss", "20 of 20"):
        assert told in page.words, told
    assert text.count("<svg") == 4


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_a_page_that_can_be_read(sweep: Path, tmp_path: Path, width: int) -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    write_leaderboard(sweep)
    inner = html.escape((sweep / "report.html").read_text(), quote=True)
    script = (
        "<script>onload = () => { const d = document.querySelector('iframe').contentDocument;"
        "const box = (o) => o.getBoundingClientRect();"
        "const letters = [...d.querySelectorAll('svg text')].map((t) => box(t).height).sort((a, b) => a - b);"
        "document.title = [d.documentElement.scrollWidth, d.querySelector('.scroll').clientWidth,"
        "box(d.querySelector('svg')).width, box(d.querySelectorAll('th')[3]).right, letters[0]].join(' '); }</script>"
    )
    frame = f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{inner}"></iframe>'
    (tmp_path / "frame.html").write_text(f'<!doctype html><meta charset="utf-8">{frame}{script}')
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,900", "--dump-dom", f"file://{tmp_path / 'frame.html'}"]  # fmt: skip
    dom = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    page, table, picture, rate, letters = map(float, re.search(r"<title>([\d. ]+)</title>", dom).group(1).split())
    assert page <= width and table <= width and 200 < picture <= width
    assert rate <= width, "tokens/s is out of sight"
    assert letters >= 8, "the smallest words of the pictures cannot be read"


def test_best_follows_the_verdict_only_when_asked(sweep: Path, capsys) -> None:
    best = sweep.parent / "run" / "checkpoints" / "BEST"
    write_leaderboard(sweep)
    assert not best.is_symlink()
    (sweep / "0" / ".hydra").mkdir()
    (sweep / "0" / ".hydra" / "config.yaml").write_text("serve: {benchmark: {update_best: true}}\n")
    write_leaderboard(sweep)
    assert str(best.readlink()) == "epoch_1_step_900" and "BEST ->" in capsys.readouterr().err
    for path in sweep.glob("[0-3]/result.json"):
        value = json.loads(path.read_text())
        value["benchmark"] |= {"speedup": 0.5, "speedup_interval": [0.4, 0.6]}
        path.write_text(json.dumps(value))
    best.unlink()
    write_leaderboard(sweep)
    assert not best.is_symlink() and "BEST stays as it is" in capsys.readouterr().err


def test_held_out_figures_are_those_of_the_checkpoints_own_step(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "epoch_0_step_20"
    (checkpoint / "model").mkdir(parents=True)
    assert validation_of(str(checkpoint)) is None and validation_of("org/model") is None
    rows = [{"step": step, "epoch": 0, "validation": {"loss": float(step)}} for step in (10, 20)] + [{"step": 20}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert validation_of(str(checkpoint / "model")) == {"loss": 20.0}

"""Reports in a real browser: at 1400 and 420 pixels, light and dark, nothing is cut off, too small or too pale.

The tests run where Chromium or Chrome is found. S3D_SCREENSHOTS=FOLDER keeps pictures of the pages, for looking at.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from s3d_fast.report import write_comparison, write_report
from tests.report.test_report import about, phase, three_phases, write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")

VIEWS = [(width, scheme) for width in (1400, 420) for scheme in ("light", "dark")]
# Every view is a frame; the browser gives a frame the colour scheme of its element.
FRAME = '<iframe style="border:0;width:{width}px;height:{height}px;color-scheme:{scheme}" srcdoc="{page}"></iframe>'
MEASURE = r"""
function luminance(css) {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
  const part = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255);
  const line = part.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * line[0] + 0.7152 * line[1] + 0.0722 * line[2];
}
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function inside(part, whole) {
  return part.left >= whole.left - 1 && part.right <= whole.right + 1 && part.top >= whole.top - 1
    && part.bottom <= whole.bottom + 1;
}
function overlap(a, b) {
  return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
}
function measured(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, body = page.body, problems = [];
  const paper = view.getComputedStyle(body).backgroundColor;
  const wide = page.documentElement.clientWidth;
  const whole = {left: 0, right: wide, top: -1e9, bottom: 1e9};
  if (page.documentElement.scrollWidth > wide) problems.push('the page scrolls sideways');
  page.querySelectorAll('details').forEach(one => { one.open = true; });
  if (page.documentElement.scrollWidth > wide) problems.push('the page scrolls sideways once details are open');
  for (const cell of page.querySelectorAll('td, h1, h2, p, li, dd, summary, tbody tr')) {
    const box = cell.getBoundingClientRect();
    if (!inside(box, whole) || cell.scrollWidth > cell.clientWidth + 1 && cell.tagName != 'TR')
      problems.push('does not fit: ' + cell.textContent);
  }
  let smallest = 1e9, spots = 0;
  for (const svg of page.querySelectorAll('svg.plot')) {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    if (!inside(box, whole)) problems.push('a figure does not fit');
    const texts = [...svg.querySelectorAll('text')].filter(one => !one.closest('.tip'));
    const boxes = texts.map(one => one.getBoundingClientRect());
    texts.forEach((text, place) => {
      const style = view.getComputedStyle(text);
      smallest = Math.min(smallest, scale * parseFloat(style.fontSize));
      if (!inside(boxes[place], box)) problems.push('cut off: ' + text.textContent);
      if (contrast(style.fill, paper) < 4.5) problems.push('pale: ' + text.textContent);
      for (let other = 0; other < place; other++)
        if (overlap(boxes[place], boxes[other]))
          problems.push('overlap: ' + text.textContent + ' / ' + texts[other].textContent);
    });
    for (const line of svg.querySelectorAll('.line, .marker')) {
      const style = view.getComputedStyle(line);
      if (style.opacity == '1' && contrast(style.stroke, paper) < 3) problems.push('pale line ' + style.stroke);
    }
    for (const spot of svg.querySelectorAll('.spot')) {
      const tip = spot.querySelector('.tip'), frame = tip.querySelector('rect').getBoundingClientRect();
      spots += 1;
      if (!inside(frame, whole)) problems.push('a value leaves the page: ' + tip.textContent);
      for (const line of tip.querySelectorAll('text'))
        if (!inside(line.getBoundingClientRect(), frame)) problems.push('leaves its box: ' + line.textContent);
    }
  }
  const first = page.querySelector('.spot'), tip = first.querySelector('.tip');
  const before = view.getComputedStyle(tip).visibility;
  first.focus();
  const after = view.getComputedStyle(tip).visibility;
  return {problems: [...new Set(problems)], paper: luminance(paper), smallest, spots, before, after,
    height: page.documentElement.scrollHeight, scripts: page.scripts.length};
}
addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(measured);
  const out = document.createElement('pre');
  out.id = 'out'; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
"""


def chromium(page: Path, *options: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [*command, profile, page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def look(path: Path, folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Return what the browser measures of a page in every view; keep screenshots if asked."""
    source = html.escape(path.read_text())
    frames = {
        (width, scheme): FRAME.format(width=width, scheme=scheme, page=source, height=1000) for width, scheme in VIEWS
    }
    wrapper = folder / "views.html"
    wrapper.write_text(f"<!DOCTYPE html><meta charset=utf-8>{''.join(frames.values())}<script>{MEASURE}</script>")
    out = re.search(r'<pre id="out">(.*?)</pre>', chromium(wrapper, "--dump-dom"), re.DOTALL)
    assert out is not None
    found = dict(zip(VIEWS, json.loads(html.unescape(out[1])), strict=True))
    if os.environ.get("S3D_SCREENSHOTS"):
        for (width, scheme), measured in found.items():
            # Details are measured open; screenshots show them folded.
            height = measured["height"]
            frame = FRAME.format(width=width, scheme=scheme, page=source, height=height)
            (folder / "one.html").write_text(f'<!DOCTYPE html><meta charset=utf-8><body style="margin:0">{frame}')
            picture = Path(os.environ["S3D_SCREENSHOTS"]) / f"{path.stem}-{width}-{scheme}.png"
            chromium(folder / "one.html", f"--window-size={max(width, 520)},{height}", f"--screenshot={picture}")
    return found


def assert_readable(found: dict[tuple[int, str], dict[str, Any]]) -> None:
    for view, measured in found.items():
        assert measured["problems"] == [], view
        # Text of figures is never smaller than nine pixels.
        assert measured["smallest"] >= 9, view
        # Values appear on hover and on focus alone.
        assert measured["spots"] > 20
        assert (measured["before"], measured["after"]) == ("hidden", "visible"), view
        assert measured["scripts"] == 0
        assert (measured["paper"] > 0.9) == (view[1] == "light"), view


def test_a_report_can_be_read_in_every_view(tmp_path: Path) -> None:
    # A dozen layers, long and hostile names, seven phases, and parts that took hours.
    layers = [*(f"features.{place}.conv.pointwise" for place in range(8)), "0", "x" * 80, "<script>1</script>", "重み"]
    phases = []
    for index in range(7):
        record = phase(index, 0.3 + 0.1 * index, split=index < 6, widths={name: 8 << index for name in layers})
        record["metrics"] |= {"top5": 0.8, "perplexity per token": 12345.678}
        record["params"], record["macs"] = 1_234_567 << index, 45_678_901 << index
        record["seconds"] = {stage: 3600.0 * seconds for stage, seconds in record["seconds"].items()}
        record["epochs"] *= 10
        phases.append(record)
    run = about(notes="a long setting " * 20, path="/very/long/" * 30) | {"layers": {"0": {"kind": "conv"}}}
    folder = write_run(tmp_path / "run", run, phases)
    assert_readable(look(write_report(folder), tmp_path))


def test_a_comparison_can_be_read_in_every_view(tmp_path: Path) -> None:
    folders = []
    for method in ("s3d", "s2d", "net2net", "uniform"):
        for seed in range(2):
            records = three_phases(0.3 + 0.01 * seed, 0.52, 0.61 + 0.02 * len(method))
            folders.append(write_run(tmp_path / f"{method}-{seed}", about(method, seed), records))
    folders.append(write_run(tmp_path / "other", about(fraction=0.5, label_smoothing=0.1), three_phases()))
    found = look(write_comparison(folders, tmp_path / "out"), tmp_path)
    assert_readable(found)

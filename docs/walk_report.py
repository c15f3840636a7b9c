"""A reader with a browser: opens a page that ``forge report`` has written, and points at each of its charts.

``python docs/walk_report.py report.html`` prints what it has found, and ends with 1 if anything is wrong. It takes what
``walk_site.py`` takes. At the widths of a desk and of a phone, light and dark: errors in the console, a page wider than
its window, pale text, axes without numbers or with numbers over each other, a chart that says nothing of its unit, and
a pointer under which there is not what the data have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from walk_site import CONTRAST, OVERFLOW, SCHEMES, WIDTHS

SMALLEST = 10
"""Pixels of a letter at an axis."""
AXES = """figure => {
  const texts = [...figure.querySelectorAll("svg text")].map(node => [node, node.getBoundingClientRect()]);
  const size = Math.min(...texts.map(([node]) => parseFloat(getComputedStyle(node).fontSize)));
  const numbers = texts.filter(([node]) => /^[-\\d.]/.test(node.textContent));
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
  const over = numbers.some(([, a], i) => numbers.slice(i + 1).some(([, b]) => meet(a, b)));
  return {numbers: numbers.length, size, over, texts: texts.map(([node]) => node.textContent)};
}"""
DATA = """figure => JSON.parse(figure.querySelector("script").textContent)"""


def main() -> int:
    """Look at the page of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--browser", help="path of a Chromium; by default the one that playwright has installed")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each width and scheme")
    given = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.browser)
        views = [(scheme, device) for scheme in SCHEMES for device in WIDTHS]
        found = [problem for view in views for problem in _seen(browser, given.report, *view, given.pictures)]
    print(*found, f"{len(views)} views, {len(found)} problems", sep="\n")
    return 1 if found else 0


def _seen(browser: Any, report: Path, scheme: str, device: str, pictures: Path | None) -> Iterator[str]:
    """A sentence for each problem of the page at a width, light or dark, with all that is folded away opened."""
    context = browser.new_context(viewport={"width": WIDTHS[device], "height": 900}, color_scheme=scheme)
    page, said = context.new_page(), list[str]()
    page.on("console", lambda one: said.append(f"console: {one.text}"))
    page.on("pageerror", lambda one: said.append(str(one)))
    page.goto(report.resolve().as_uri())
    page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    charts = page.query_selector_all("figure.chart")
    for figure in charts:
        figure.wait_for_selector("svg > *", state="attached")
    problems = [*_problems(page), *said] if charts else ["no chart"]
    if pictures is not None:
        page.screenshot(path=pictures / f"report.{device}.{scheme}.png", full_page=True)
    context.close()
    yield from (f"{device}, {scheme}: {problem}" for problem in problems)


def _problems(page: Any) -> Iterator[str]:
    if wide := page.evaluate(OVERFLOW):
        yield f"wider than the window: {wide}"
    for colours, example in page.evaluate(CONTRAST).items():
        yield f"pale text: {colours}: {example}"
    for figure in page.query_selector_all("figure.chart"):
        data = figure.evaluate(DATA)
        axes = figure.evaluate(AXES)
        if axes["numbers"] < 4 or "step" not in axes["texts"]:
            yield f"{data['title']}: axes with {axes['texts']}"
        if data["unit"] and data["unit"] not in axes["texts"]:
            yield f"{data['title']}: the unit {data['unit']!r} is not at its axis"
        if axes["size"] < SMALLEST:
            yield f"{data['title']}: letters of {axes['size']} pixels"
        if axes["over"]:
            yield f"{data['title']}: numbers over each other: {axes['texts']}"
        yield from _pointed_at(page, figure, data)


def _pointed_at(page: Any, figure: Any, data: Any) -> Iterator[str]:
    """A sentence if the values under the pointer are not those of the step that stands there."""
    figure.scroll_into_view_if_needed()
    box = figure.query_selector("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = figure.query_selector(".tip")
    if not tip.is_visible():
        yield f"{data['title']}: nothing under the pointer"
        return
    first, *_ = tip.inner_text().splitlines()
    step = int(first.removeprefix("step ").replace(",", ""))
    shown = [float(one.inner_text().replace(",", "")) for one in tip.query_selector_all("b")]
    expected = [y for curve in data["curves"] for x, y in zip(curve["x"], curve["y"], strict=True) if x == step]
    if not expected or any(min(abs(one - other) for one in shown) > 1e-3 * abs(other) for other in expected):
        yield f"{data['title']}: {shown} under the pointer at step {step}, and {expected} in the data"


if __name__ == "__main__":
    sys.exit(main())

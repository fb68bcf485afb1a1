"""Screenshots of a report in headless Chromium: light and dark, wide and narrow.

    python benchmarks/report_pictures.py demo/report.html pictures/

It also checks in the page that nothing is wider than the window and that nothing was fetched.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
SCHEMES = {"light": 1, "dark": 0}
WIDTHS = {"wide": (1300, 2800), "narrow": (420, 5600)}
PROBE = """
<script>addEventListener("load", () => {
  const root = document.documentElement;
  const texts = [...document.querySelectorAll("svg text")].filter(t => {
    const a = t.getBoundingClientRect(), b = t.closest("figure").getBoundingClientRect();
    return a.left < b.left || a.right > b.right;
  }).map(t => t.textContent);
  document.title = "PROBE" + JSON.stringify({
    width: root.scrollWidth, window: innerWidth, ground: getComputedStyle(document.body).backgroundColor,
    fetched: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
    outside: texts, figures: document.querySelectorAll("figure").length,
  });
});</script>
"""


def run(browser: str, page: Path, width: int, height: int, scheme: str, *flags: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", *flags, page.resolve().as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("pictures", type=Path)
    given = parser.parse_args()
    browser = next((name for name in BROWSERS if shutil.which(name)), None)
    if browser is None:
        sys.exit(f"One of {', '.join(BROWSERS)} is needed, and none is installed.")
    given.pictures.mkdir(parents=True, exist_ok=True)
    probed = given.pictures / "probed.html"
    probed.write_text(given.report.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    grounds, wrong = set(), []
    for scheme in SCHEMES:
        for name, (width, height) in WIDTHS.items():
            picture = given.pictures / f"{scheme}-{name}.png"
            run(browser, given.report, width, height, scheme, f"--screenshot={picture.resolve()}")
            page = run(browser, probed, width, height, scheme, "--dump-dom")
            found = json.loads(re.search(r"<title>PROBE(.*?)</title>", page, re.DOTALL)[1].replace("&amp;", "&"))
            grounds.add(found["ground"])
            print(picture, found)
            if found["width"] > found["window"] or found["fetched"] or found["outside"]:
                wrong.append(picture.name)
    probed.unlink()
    if len(grounds) != 2:
        sys.exit("Light and dark look the same.")
    if wrong:
        sys.exit(f"Wrong in {', '.join(wrong)}.")


if __name__ == "__main__":
    main()

"""Chromium, driven by Playwright: the machine's own, or the Debian package unpacked into data/."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.hosts import packages
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{home}/usr/share/fonts</dir><cachedir>{cache}</cachedir></fontconfig>
"""
# Chromium tells pages of violations of their policy, and its console too; a page that is well has none.
_WATCH = "addEventListener('securitypolicyviolation', (event) => console.error(`policy: ${event.violatedDirective}`))"


@dataclass(kw_only=True)
class Watched:
    """A page, with what it asked for and what went wrong in it."""

    page: Page
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def charts(self) -> dict[str, Any]:
        """Titles of charts, and the numbers of their canvases."""
        return dict(
            self.page.evaluate(
                "Object.fromEntries([...document.querySelectorAll('.chart')].map((chart) =>"
                " [chart.querySelector('h3').firstChild.data, chart.querySelectorAll('canvas').length]))"
            )
        )


@contextmanager
def chromium(scratch: Path) -> Iterator[Browser]:
    """A headless browser.

    Args:
        scratch: an empty folder.
    """
    from playwright.sync_api import sync_playwright

    program, environment = _program(scratch)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, env=environment)
        yield browser
        browser.close()


def _program(scratch: Path) -> tuple[str, dict[str, str | float | bool] | None]:
    """Return the program and its environment; None for that of this process."""
    installed = shutil.which("chromium")
    if installed:
        return installed, None
    home = packages.unpacked(ROOT / "data" / "debian", packages.BROWSER)
    (scratch / "fonts.conf").write_text(_FONTS.format(home=home, cache=scratch / "fonts"), encoding="utf-8")
    libraries = [*home.glob("usr/lib/*-linux-gnu"), *home.glob("lib/*-linux-gnu")]
    libraries += [folder for each in libraries for folder in each.iterdir() if folder.is_dir()]
    environment: dict[str, str | float | bool] = {
        "HOME": str(scratch),
        "PATH": "/usr/bin:/bin",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "FONTCONFIG_FILE": str(scratch / "fonts.conf"),
    }
    return str(home / "usr" / "lib" / "chromium" / "chromium"), environment


@contextmanager
def opened(browser: Browser, url: str, **look: Any) -> Iterator[Watched]:
    """A page of its own context; `look` are Playwright's options, such as `color_scheme`."""
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}} | look)
    page = context.new_page()
    watched = Watched(page=page)
    page.on("request", lambda request: watched.requests.append(request.url))
    page.on("console", lambda message: watched.errors.append(message.text))
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.add_init_script(_WATCH)
    page.goto(url)
    yield watched
    context.close()

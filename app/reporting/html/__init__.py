"""The report of a run: one HTML file that needs nothing else, made from the run's events alone."""

from __future__ import annotations

from trainwright.reporting.html.page import Facts, ReportListener, render, summary_html, write_report

__all__ = ["Facts", "ReportListener", "render", "summary_html", "write_report"]

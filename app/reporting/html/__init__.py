"""The report of a run: one self-contained HTML file, made from the events of the run."""

from __future__ import annotations

from trainwright.reporting.html.run_report import ReportListener, render_report, summary_html, write_report

__all__ = ["ReportListener", "render_report", "summary_html", "write_report"]

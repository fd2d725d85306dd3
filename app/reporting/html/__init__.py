"""The report of a run: one HTML file that needs nothing else, made from the run's events alone."""

from __future__ import annotations

from trainwright.reporting.html.run_report import ReportFacts, ReportListener, render_report, summary_html, write_report

__all__ = ["ReportFacts", "ReportListener", "render_report", "summary_html", "write_report"]

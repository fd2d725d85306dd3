"""The report of a run: one self-contained HTML file, made from the events of the run."""

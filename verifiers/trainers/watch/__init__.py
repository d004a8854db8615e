"""Monitoring of a training: report, journal, display, plot, audit, advice, trackers."""

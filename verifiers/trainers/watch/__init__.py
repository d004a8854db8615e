"""What a training shows of itself: report, journal, display, plot, audit, advice, trackers."""

"""Learning from traffic: audits, what skipping costs, the alarm, two gates side by side, labels for the history."""

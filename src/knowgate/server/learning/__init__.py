"""Learning from traffic: audits of skipped requests, the loss alarm, A/B tests, and labels for the history."""

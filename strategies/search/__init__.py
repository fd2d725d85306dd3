"""The search for plans: candidates, schedules, cuts, ranking."""

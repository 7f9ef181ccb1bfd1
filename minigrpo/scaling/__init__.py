"""Scaling out: the same task on TRL, and on several processes."""

"""Studies: exact answers by enumeration, and runs with one thing changed."""

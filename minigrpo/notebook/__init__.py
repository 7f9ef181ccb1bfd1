"""What the notebooks call beside the course itself: setup and figures."""

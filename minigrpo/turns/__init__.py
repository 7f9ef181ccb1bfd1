"""A task over several turns with a tool: look for the commit that broke the build."""

"""From files of results to tables on the terminal, pictures, and the figures in README.md and docs/."""

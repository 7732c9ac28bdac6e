"""Generated files that git holds: builds and readers need them before anything is installed."""

"""Writers of the generated files, which are in git because builds and readers need them before an installation."""

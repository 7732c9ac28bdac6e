"""Times this library and the alternatives that a user has, in alternation in one process."""

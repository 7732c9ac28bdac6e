"""Code used by several groups of operators: parameters, rules, layouts, lengths and sparse modes."""

"""Code used by several families of operators: parameters, rules, layouts, lengths and sparse modes."""

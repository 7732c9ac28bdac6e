"""Code that operator families share: parameters, rules, layouts, lengths and sparse modes."""

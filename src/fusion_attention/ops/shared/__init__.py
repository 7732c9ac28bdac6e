"""What families of operators share: parameters, rules, layouts, lengths, sparse modes."""

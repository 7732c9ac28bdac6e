"""Is a kernel right? Calls with their results, judged by the formulas, and which well-known mistake explains them."""

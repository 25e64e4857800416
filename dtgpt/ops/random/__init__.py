"""Random numbers as a function of (key, global index), and the dropout masks made of them."""

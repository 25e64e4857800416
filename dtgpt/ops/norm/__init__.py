"""LayerNorm with the residual sum, dropout and bias before it."""

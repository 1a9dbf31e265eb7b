"""timm blocks over a packed sequence, and the checks that a model can be run that way."""

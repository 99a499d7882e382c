"""How a model's gradients reach a Reducer."""

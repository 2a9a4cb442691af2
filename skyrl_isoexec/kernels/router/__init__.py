"""Router: scores of all experts, the choice of a few, their weights."""

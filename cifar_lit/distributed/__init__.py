"""The processes ("ranks") of one run: how they find each other, and how all end when one of them is gone."""

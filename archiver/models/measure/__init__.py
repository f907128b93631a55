"""Two models beside each other: how far apart their answers are, and what each costs."""

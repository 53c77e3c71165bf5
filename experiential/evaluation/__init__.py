"""The fair comparison: cells that were played, the card made of them, its picture and its page."""

"""What a schedule is: actions, placements, costs, orders, and their text and file forms."""

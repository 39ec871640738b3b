"""Which values B recomputes instead of keeping."""

"""Reports for people: tables for the terminal, charts, and self-contained HTML pages."""

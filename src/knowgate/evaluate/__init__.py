"""What labelled questions show: numbers, tables and the self-contained HTML report."""

"""What the columns and messages of a row mean: shapes of public data, known names, and what is not used."""

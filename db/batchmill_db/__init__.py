"""Every SQL statement of Batchmill: schema, migrations, and one module of named statements per noun."""

"""The programs that the other systems' seeders and receivers run, one module a system; ``talk`` says how they are driven."""

"""HTML reports about one or several runs, from the files in their run folders."""

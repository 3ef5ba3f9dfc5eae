"""What a run needs so that its database and screenshots can be outside its directory: PostgreSQL, object stores."""

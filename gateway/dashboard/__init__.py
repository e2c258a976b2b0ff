"""`gateway status`: `feed` reads status documents, `view` draws them, `live` keeps the drawing fresh."""

"""The wire code that both ends share: sessions, security, and conversion between records and protobuf messages."""

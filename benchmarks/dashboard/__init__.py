"""What the dashboard costs: pages of a large run in a real browser, and a coordinator with dashboards open."""

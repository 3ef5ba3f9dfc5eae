"""What a managed pool of VMs gains over booting in Reset, in simulated time."""

"""What tests share: jobs, servers, clusters and faults. No test is defined here."""

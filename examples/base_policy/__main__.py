from examples.base_policy.make import main

main()
